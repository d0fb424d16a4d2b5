"""python -m services.decode --config F"""
from services.decode.server import main

main()
