"""`deep-ep check`: is this machine right, and if not, what is to be done?"""
