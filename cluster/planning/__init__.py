"""Planning without a running application: sizes, placement, memory, bandwidth; and checks of a model's folder."""
