"""Run by test_clients.py with a Python that has langchain-openai: what an application does with ChatOpenAI, against the
address and model given. Prints one JSON object with what it saw."""

import asyncio
import json
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


@tool  # type: ignore[untyped-decorator] # langchain is not in the environment that types are checked in
def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def main(address: str, model: str) -> None:
    told = {"base_url": address, "api_key": "unused", "model": model, "max_tokens": 8}
    chat = ChatOpenAI(**told)
    turns = [SystemMessage("Be brief. " * 60), HumanMessage("Why does a prefix cache help?")]

    whole = chat.invoke(turns)
    pieces = list(ChatOpenAI(**told, stream_usage=True).stream([*turns, whole, HumanMessage("And then?")]))
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    batch = asyncio.run(chat.abatch([[HumanMessage(str(number))] for number in range(4)]))
    with_tools = chat.bind_tools([weather]).invoke(turns)
    response = ChatOpenAI(**told, use_responses_api=True, include_response_headers=True).invoke(turns)
    vectors = OpenAIEmbeddings(
        base_url=address, api_key="unused", model=model, check_embedding_ctx_length=False
    ).embed_documents(["one", "two", "one"])
    print(
        json.dumps(
            {
                "whole": [whole.text, whole.usage_metadata],
                "pieces": len(pieces),
                "streamed": [streamed.text, streamed.usage_metadata],
                "batch": [isinstance(answer, AIMessage) and answer.text for answer in batch],
                "with_tools": with_tools.text,
                "response": [response.text, response.usage_metadata],
                "headers": {k: v for k, v in response.response_metadata.get("headers", {}).items() if "pointsman" in k},
                "vectors": [len(vectors), vectors[0] == vectors[2], vectors[0] == vectors[1]],
            },
            default=str,
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
