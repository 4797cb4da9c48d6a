"""A model's folder in Hugging Face's format: config.json and similar files, typed and checked.

`config_reader` reads a folder into a `model_config.ModelConfig`. Each of the other modules reads one part of it, and
`checkpoint` reads the headers of the weights. `hub` fetches a model from the Hugging Face Hub. None of them imports
torch or knows an architecture; those are in `engine.models`.
"""
