"""Models, data and trusted code of a job: found, checked and downloaded before anything heavy starts."""
