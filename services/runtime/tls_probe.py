"""Why a gRPC connection did not come about, where TLS is the reason: gRPC itself only says that the socket was closed.

One more connection, by Python's own TLS, hears what the other side objects to.
"""

import contextlib
import socket
import ssl
from pathlib import Path

from services.runtime.config import SecuritySection

_PATIENCE_S = 2.0


def explain(address: str, section: SecuritySection) -> str:
    """What the server at `address` (host:port) and `section` disagree about, "" when it is not TLS. Blocks up to 4 s."""
    host, _, port = address.rpartition(":")
    context = _context(section)
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=section.server_name) as wrapped:
                if not section.certificate:
                    return "it speaks TLS: give the certificate, key and ca of [security] (--config)"
                return "" if _hears_us(wrapped) else f"it does not accept {section.certificate}: is that of another authority, or expired?"
        except ssl.SSLCertVerificationError as error:
            return f"its certificate is none that {section.ca} vouches for as {section.server_name}: {error.verify_message}"
        except ssl.SSLError as error:
            return _objection(error.reason or str(error), section)
    return ""


def _hears_us(wrapped: ssl.SSLSocket) -> bool:
    """In TLS 1.3 a server objects after our side has finished, and gRPC's hangs up without a word; else it sends its settings."""
    try:
        return bool(wrapped.recv(1))
    except ConnectionError:
        return False
    except TimeoutError:
        return True


def _context(section: SecuritySection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])  # gRPC's servers hear nobody out who does not ask for it
    if section.certificate:
        context.load_verify_locations(section.ca)
        context.load_cert_chain(Path(section.certificate), Path(section.key))
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only whether it is TLS is of interest
    return context


def _objection(reason: str, section: SecuritySection) -> str:
    if reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return "it speaks no TLS: leave out the certificate, key and ca of [security]" if section.certificate else ""
    if not section.certificate:
        return "it speaks TLS: give the certificate, key and ca of [security] (--config)"
    return f"it does not accept {section.certificate}: {reason.lower().replace('_', ' ')}"
