"""Planning without a running application: sizes of a model, machines, memory, bandwidth; checks of a model's folder."""
