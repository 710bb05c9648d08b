"""The layers of a stage other than attention."""
