"""The runner of a device that works through a queue of its own, while the CPU is somewhere else.

StepPlan ─> Tables, CurrentBatch    what changed goes into a pinned buffer: StagedWrites, one kernel
         ─> StepShape               which captured step serves this one, if any
         ─> Step                    inputs, model, logits, tokens: replayed, or run eagerly
         ─> Extras                  rows that ask for more than a graph draws; log probabilities
         ─> Outbox                  tokens arrive in pinned memory; an event says when

Nothing here waits for the device but `PendingStep.result`. Tables and inputs stay at their addresses for the life of a
runner, so that a captured step finds them.
"""
