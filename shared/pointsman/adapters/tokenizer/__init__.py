"""Turns text and chats into token ids exactly as the engine does."""

from pointsman.adapters.tokenizer.chat_template import ChatTemplateError, TemplateRefusedError, UnsupportedContentError
from pointsman.adapters.tokenizer.tokenizer import Tokenizer, TokenizerLoadError

__all__ = ["ChatTemplateError", "TemplateRefusedError", "Tokenizer", "TokenizerLoadError", "UnsupportedContentError"]
