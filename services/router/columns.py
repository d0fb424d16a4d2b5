"""A step's columns, as what each of its requests gets."""

from collections.abc import Iterator

from proto.baton.v1 import decode_pb2
from services.router.mailbox import StepSlice
from services.runtime.errors import EngineError


def slices_of(step: decode_pb2.StepTokens) -> Iterator[tuple[int, StepSlice]]:
    """Every handle's slice. The columns become lists once for all of them. Raises EngineError when they do not fit together."""
    ids, logprobs, tops = list(step.token_ids), list(step.logprobs), list(step.top_logprobs)
    drafts = step.num_accepted_drafts or [0] * len(step.handles)
    columns = (step.attempts, step.first_index, step.num_tokens, drafts)
    if {len(column) for column in columns} != {len(step.handles)} or sum(step.num_tokens) != len(ids):
        raise EngineError(f"a step's columns differ in length: {len(step.handles)} handles, {len(ids)} tokens")
    if any(column and len(column) != len(ids) for column in (logprobs, tops)):
        raise EngineError(f"a step has {len(ids)} tokens but {len(logprobs)} logprobs and {len(tops)} top_logprobs")
    start = 0
    for handle, attempt, first_index, num_tokens, num_drafts in zip(step.handles, *columns, strict=True):
        end = start + num_tokens
        yield handle, StepSlice(attempt, first_index, ids[start:end], logprobs[start:end], tops[start:end], num_drafts)
        start = end
