"""A model's folder in the form that Hugging Face gave it: config.json and its kin, typed and checked.

`model_config.ModelConfig` is all of it; the other modules read a part each. None of them imports torch.
"""
