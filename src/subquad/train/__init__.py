"""Training: schedules, optimisers, checkpoints, health checks, logs and the loop; a batch's loss is `subquad.tasks`."""
