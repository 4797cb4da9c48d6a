"""The blocks that models are built from. A model file holds only what sets its architecture apart."""
