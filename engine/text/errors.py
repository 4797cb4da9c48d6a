"""Errors of converting between text and token ids."""


class TextError(ValueError):
    """Base class of the errors of this package.

    `detail` is for logs: it may name classes, attributes and files, which clients must not see.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class TokenizerError(TextError):
    """A model folder has no usable tokenizer, or one that contradicts itself."""


class ChatTemplateError(TextError):
    """The model's chat template is missing or broken, so that no messages can be rendered."""


class InvalidMessages(TextError):
    """The messages of one chat cannot be rendered; the caller has to change them."""
