"""The runner: executes one step of a plan on one device. It decides nothing itself.

runner.py      the order of a step, the same on every device
tables.py      the state of each request on the device, one row each, from its first plan to its last
batch.py       the chunks of one step as columns of numbers
inputs.py      the inputs of one step
shapes.py      the sizes of steps, and the interface that chooses a captured one for a step
sampling.py    logits processors and log probabilities
outputs.py     sampled tokens on their way to the scheduler
warmup.py      steps that run before the engine is ready
backends/      what differs between kinds of devices: memory, order of work, captured steps, draws

StepPlan ─> RowTables         changes to rows, and the batch of the step
         ─> StepShape         the captured size that serves it, if any
         ─> StepInputs        token ids, positions, slots, lengths: filled from the tables
         ─> model ─> draws    logits only where a token is drawn or scored
         ─> StepOutputs        tokens and log probabilities ─> StepResult
"""
