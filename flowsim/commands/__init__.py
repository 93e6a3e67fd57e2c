"""Commands of the command line that outgrew `flowsim.__main__`: options and run."""
