"""For tests that own no configuration. `CLEAR`: loopback alone; `INSECURE`: names too, which count as beyond it."""

from services.runtime.config import SecuritySection
from services.runtime.security import Security

CLEAR = Security.of(SecuritySection())
INSECURE = Security.of(SecuritySection(insecure=True))
