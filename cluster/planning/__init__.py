"""What an application would need, without one: sizes of a model, machines, memory, bandwidth."""
