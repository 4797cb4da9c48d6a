"""A model's folder in Hugging Face's format: config.json and similar files, typed and checked.

`model_config.ModelConfig` is all of it, `config_reader` makes it; the other modules read a part each, `checkpoint` the
headers of the weights. `hub` fetches folders by their names. None of them imports torch, and none knows an
architecture: those are `engine.models`.
"""
