"""`make bench-peers`: the buffer beside other ways of moving groups. Only numpy is imported by what all sides share."""
