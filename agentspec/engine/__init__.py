"""The target model, its KV, verification, commit and the step loop."""
