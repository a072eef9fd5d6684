"""What every adapter of Commands does with a payload that does not decode: count it, log it, and answer nothing."""

from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.codec import UndecodableError, decode_command
from pointsman.ports import CommandHandler, PayloadHandler, Reply


def decoding(handler: CommandHandler, listener: LogListener) -> PayloadHandler:
    async def on_payload(payload: bytes, reply: Reply) -> None:
        try:
            command = decode_command(payload)
        except UndecodableError as error:
            listener.undecodable(reply.subject, str(error))
            return
        await handler(command, reply)

    return on_payload
