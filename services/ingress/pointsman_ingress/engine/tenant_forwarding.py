"""Tells an engine whose request it is, for engines that are fair between clients themselves (`shared/pointsman_vllm`).

vLLM hands `vllm_xargs` to its scheduler and nothing else of what a client could be named by. What the client itself says
there about whose request it is does not count: the ingress knows better.
"""

from typing import Any

import msgspec

from pointsman.primitives import Tenant

FIELD = "vllm_xargs"
CLIENT = "pointsman_client"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def naming_client(body: bytes, tenant: Tenant) -> bytes:
    """The same request, with the tenant's name in it. `body` is a JSON object with fields that was read before.

    The name comes last, where it wins, should the client have written the field in a way that is not seen here.
    """
    if FIELD.encode() not in body:
        end = body.rindex(b"}")
        return body[:end] + b',"%b":%b' % (FIELD.encode(), msgspec.json.encode({CLIENT: tenant})) + body[end:]
    fields = _fields.decode(body)
    known = msgspec.json.decode(fields[FIELD]) if FIELD in fields else None
    arguments: dict[str, Any] = known if isinstance(known, dict) else {}
    return msgspec.json.encode({**fields, FIELD: msgspec.Raw(msgspec.json.encode({**arguments, CLIENT: tenant}))})
