"""The sides: each module has its Producer and Consumer, and how its server is started."""
