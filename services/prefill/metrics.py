"""What a prefill engine tells Prometheus besides services/kv/metrics.py. Autoscalers want the queue's tokens and age, and leased pages."""

from prometheus_client import Counter, Gauge

QUEUED_TOKENS = Gauge("baton_prefill_queued_tokens", "Prompt tokens here that are neither cached nor computed yet")
QUEUED_REQUESTS = Gauge("baton_prefill_queued_requests", "Prompts that wait for pages or their first step")
QUEUE_AGE = Gauge("baton_prefill_queue_age_seconds", "Seconds that the oldest of the waiting prompts has waited; 0 when none does")
LEASED_PAGES = Gauge("baton_prefill_leased_pages", "Pages kept for readers alone: they fill the pool when decode takes none")
COMPUTED_TOKENS = Counter("baton_prefill_computed_tokens", "Prompt tokens computed by forwards")
