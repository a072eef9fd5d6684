"""What every adapter of Commands does with payloads: a command that cannot be written is logged and not sent; one that
does not decode is counted, logged, and handed on as its refusal; an answer that does not decode is no answer."""

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
    CommandTimeoutError,
    CommandTooLargeError,
    CommandUnsendableError,
    PayloadHandler,
    Reply,
)


def encoded(command: AnyCommand, listener: LogListener) -> bytes:
    """Raises CommandUnsendableError."""
    try:
        return encode(command)
    except TooLargeError as error:
        raise CommandTooLargeError(str(error)) from error
    except UnwritableError as error:
        listener.trouble("command not sent", str(error))
        raise CommandUnsendableError(str(error)) from error


def decoding(handler: CommandHandler, listener: LogListener) -> PayloadHandler:
    async def on_payload(payload: bytes, reply: Reply) -> None:
        try:
            command = decode_command(payload, reply.subject)
        except UndecodableError as error:
            listener.undecodable(reply.subject, str(error))
            command = unreadable(payload, error)
        await handler(command, reply)

    return on_payload


def decoded_answer(subject: str, payload: bytes, listener: LogListener) -> AnyCommand:
    """Raises CommandRefusedError, CommandTimeoutError."""
    try:
        answer = decode_command(payload)
    except UndecodableError as error:
        listener.undecodable(subject, str(error))
        not_understood = f"the answer on {subject} was not understood: {error}"
        raise CommandTimeoutError(not_understood) from error
    if isinstance(answer, CommandRefused):
        refused = f"the command on {subject} was refused: {answer.detail}"
        raise CommandRefusedError(refused)
    return answer
