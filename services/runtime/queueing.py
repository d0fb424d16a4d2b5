"""What waiting and batching cost, in closed form; every formula names where it comes from. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival has to wait in M/M/c: Erlang's C formula (A. K. Erlang, 1917), by the recursion of his B formula.

    `load` = arrival rate x service time, in servers kept busy; 1.0 where that is all of them or more.
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1.0 - load / servers * (1.0 - blocked))


def wait_quantile(servers: int, load: float, service_s: float, quantile: float, service_cv2: float = 1.0) -> float:
    """Seconds that a share `quantile` of arrivals waits at most, before service; infinite under overload.

    M/M/c: P(wait > t) = C exp(-(c - load) t / service). Other services than exponential ones stretch the wait by (1 + cv2) / 2 (Allen
    and Cunneen's approximation; exact means for one server, where it is Pollaczek and Khinchine's): cv2 = 0 for M/D/c.
    """
    if load >= servers:
        return math.inf
    waits = erlang_c(servers, load)
    if waits <= 1.0 - quantile:
        return 0.0
    return service_s / (servers - load) * math.log(waits / (1.0 - quantile)) * (1.0 + service_cv2) / 2.0


@dataclass(frozen=True)
class StepLine:
    """Seconds of a decode step = `base_s` + `request_s` x requests in its batch."""

    base_s: float
    request_s: float

    def lone_s(self, accept_length: float) -> float:
        """ITL of a request that runs alone: no number of ranks makes it shorter."""
        return (self.base_s + self.request_s) / accept_length

    def share(self, tokens_per_s: float, accept_length: float) -> float:
        """Tokens a second of a rank, as a share of what it could give at any batch: accept length / seconds a request adds to a step."""
        return tokens_per_s * self.request_s / accept_length

    def itl_s(self, tokens_per_s: float, accept_length: float) -> float:
        """Mean ITL of a rank that gives `tokens_per_s`; infinite under overload.

        A batch of n gives n x accept / (base + n x request) tokens a second, shared equally: processor sharing whose rate depends on
        n. Under Poisson arrivals n is then negative binomial whatever the lengths of answers (F. P. Kelly, 1979), of mean
        (1 + base / request) x share / (1 - share); ITL = n / tokens_per_s by Little's law: the lone ITL / (1 - share).
        """
        share = self.share(tokens_per_s, accept_length)
        return self.lone_s(accept_length) / (1.0 - share) if share < 1.0 else math.inf


@dataclass(frozen=True)
class Steps:
    """Decode steps of one rank over one interval: means, which lie on the line that the steps themselves lie on."""

    batch: float  # requests a step
    step_s: float
    number: float  # of steps


_FEWEST_INTERVALS = 4
_CERTAINTY = 3.0  # standard errors that a slope must be above zero


def fit_steps(intervals: Sequence[Steps]) -> StepLine | None:
    """The line through `intervals` by least squares, weighted by their steps; None where it cannot be told: too few intervals, or
    batches so much alike, or times so noisy, that steps need not have grown with batches at all."""
    total = sum(each.number for each in intervals)
    if len(intervals) < _FEWEST_INTERVALS or total <= 0:
        return None
    batch = sum(each.number * each.batch for each in intervals) / total
    step_s = sum(each.number * each.step_s for each in intervals) / total
    variance = sum(each.number * (each.batch - batch) ** 2 for each in intervals) / total
    if variance <= 1e-9 * batch * batch:  # nothing but rounding
        return None
    slope = sum(each.number * (each.batch - batch) * (each.step_s - step_s) for each in intervals) / total / variance
    noise = sum(each.number * (each.step_s - step_s - slope * (each.batch - batch)) ** 2 for each in intervals) / total
    if slope <= 0.0 or slope * math.sqrt(variance * (len(intervals) - 2)) < _CERTAINTY * math.sqrt(noise):
        return None
    if slope * batch >= step_s:  # a step costs something before its first request: the line goes through zero at best
        return steepest_line(batch, step_s)
    return StepLine(step_s - slope * batch, slope)


def steepest_line(batch: float, step_s: float) -> StepLine:
    """The line through one point that grows fastest: what more requests in a batch cost at worst."""
    return StepLine(0.0, step_s / batch)
