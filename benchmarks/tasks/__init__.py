"""Training tasks at equal CPU seconds: this library's optimizers beside their peers."""
