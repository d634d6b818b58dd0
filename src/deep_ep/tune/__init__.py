"""`deep-ep tune`: which launch parameters are fastest on this device?"""
