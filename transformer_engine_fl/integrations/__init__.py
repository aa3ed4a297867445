"""Other people's model code on the operators here; each module is loaded when it is asked for."""
