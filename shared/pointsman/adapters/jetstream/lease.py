"""Leases as keys in the key-value bucket `pointsman-<pool>`, in server memory, without expiry: watchers measure it."""

import msgspec
from typing_extensions import override

from pointsman.adapters.jetstream.commands import Requests
from pointsman.adapters.jetstream.direct_stream import DirectStream, RevisionTakenError
from pointsman.contracts.permissions import LEADER_KEY
from pointsman.contracts.subjects import bucket_name, lease_bucket
from pointsman.ports import Lease, LeaseTakenError, Tenure
from pointsman.primitives import PoolName, Term


class _Record(msgspec.Struct, frozen=True):
    holder: str
    term: Term


_records = msgspec.json.Decoder(_Record)


class JetStreamLease(Lease):
    def __init__(
        self, requests: Requests, pool: PoolName, *, replicas: int, creates: bool = True, key: str = LEADER_KEY
    ) -> None:
        name = bucket_name(pool)
        self._subject = f"$KV.{name}.{key}"
        config = {
            "subjects": [f"$KV.{name}.>"],
            "storage": "memory",
            "max_msgs_per_subject": 1,
            "discard": "new",
            "deny_delete": True,
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "num_replicas": replicas,
        }
        self._bucket = DirectStream(requests, lease_bucket(pool), config if creates else None)

    @override
    async def look(self) -> Tenure | None:
        found = await self._bucket.last(self._subject)
        if found is None:
            return None
        try:
            record = _records.decode(found.payload)
        except msgspec.DecodeError:  # written by no scheduler or scaler: held by nobody
            return Tenure("", Term(0), found.sequence)
        return Tenure(record.holder, record.term, found.sequence)

    @override
    async def put(self, holder: str, term: Term, *, after: int) -> Tenure:
        payload = msgspec.json.encode(_Record(holder, term))
        try:
            return Tenure(holder, term, await self._bucket.write(self._subject, payload, after=after))
        except RevisionTakenError as error:
            raise LeaseTakenError(str(error)) from error
