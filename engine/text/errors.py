"""What can go wrong between text and token ids."""


class TextError(ValueError):
    """Base of the errors of this package."""


class TokenizerError(TextError):
    """A model folder has no tokenizer that can be used, or one that contradicts itself."""


class ChatTemplateError(TextError):
    """The model's chat template is missing or broken: no message can be rendered with it."""


class InvalidMessages(TextError):
    """The messages of one chat cannot be rendered: the fault of whoever sent them."""
