"""What a job costs, before it runs: owners, balance, memory and traffic of every GPU."""
