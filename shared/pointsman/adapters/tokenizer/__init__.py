"""Turns text and chats into token ids exactly as the engine does.

Routing by prefix works only when the ingress sees the tokens that the engine will see: the same `tokenizer.json`,
the same chat template rendered by the same rules, special tokens added where the engine adds them. Parts:
`chat_template` renders, `prefix_cache` remembers encodings so that the next turn of a conversation encodes only
what is new, `tokenizer` joins them; `pointsman_lab.tokenizer_training` makes the small tokenizer of the simulated engines.
"""

from pointsman.adapters.tokenizer.chat_template import ChatTemplateError, UnsupportedContentError
from pointsman.adapters.tokenizer.tokenizer import Tokenizer, TokenizerLoadError

__all__ = ["ChatTemplateError", "Tokenizer", "TokenizerLoadError", "UnsupportedContentError"]
