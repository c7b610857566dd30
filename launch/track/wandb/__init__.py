"""wandb as a tracker."""
