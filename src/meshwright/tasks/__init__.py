"""Tasks: questions with known answers that a model is asked, our own and lm-evaluation-harness's."""
