"""What every adapter of Commands does with payloads: a command that cannot be written is logged and not sent; one that
does not decode is counted, logged, and handed on as its refusal; an answer that does not decode is no answer."""

from contextlib import AbstractAsyncContextManager

from typing_extensions import override

from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.codec import (
    AnyCommand,
    TooLargeError,
    UndecodableError,
    UnwritableError,
    decode_command,
    encode,
    unreadable,
)
from pointsman.contracts.commands import CommandRefused
from pointsman.ports import (
    CommandHandler,
    CommandRefusedError,
    Commands,
    CommandTimeoutError,
    CommandTooLargeError,
    CommandUnsendableError,
    Reply,
)
from pointsman.primitives import WallSeconds


class DecodingCommands(Commands):
    """An adapter adds `request_bytes`, `serve_payloads` and `connected`."""

    def __init__(self, listener: LogListener) -> None:
        self._listener = listener

    @override
    async def request(self, subject: str, command: AnyCommand, *, timeout: WallSeconds) -> AnyCommand:
        payload = self._encoded(command)
        return self._decoded(subject, await self.request_bytes(subject, payload, timeout=timeout))

    @override
    def serve(self, subject: str, handler: CommandHandler) -> AbstractAsyncContextManager[None]:
        async def on_payload(payload: bytes, reply: Reply) -> None:
            try:
                command = decode_command(payload, reply.subject)
            except UndecodableError as error:
                self._listener.undecodable(reply.subject, str(error))
                command = unreadable(payload, error)
            await handler(command, reply)

        return self.serve_payloads(subject, on_payload)

    def _encoded(self, command: AnyCommand) -> bytes:
        """Raises CommandUnsendableError."""
        try:
            return encode(command)
        except TooLargeError as error:
            raise CommandTooLargeError(str(error)) from error
        except UnwritableError as error:
            self._listener.trouble("command not sent", str(error))
            raise CommandUnsendableError(str(error)) from error

    def _decoded(self, subject: str, payload: bytes) -> AnyCommand:
        """Raises CommandRefusedError, CommandTimeoutError."""
        try:
            answer = decode_command(payload)
        except UndecodableError as error:
            self._listener.undecodable(subject, str(error))
            raise CommandTimeoutError(f"the answer on {subject} was not understood: {error}") from error
        if isinstance(answer, CommandRefused):
            raise CommandRefusedError(f"the command on {subject} was refused: {answer.detail}")
        return answer
