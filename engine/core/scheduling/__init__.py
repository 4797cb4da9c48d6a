"""The scheduler: waiting and running requests, the plan of the next step, the results of earlier ones."""
