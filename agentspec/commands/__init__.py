"""The commands of `agentspec`, one module each; what is heavy is imported only by the command that needs it."""
