"""The scheduler: who waits, who may run, what runs in the next step, what came of those before."""
