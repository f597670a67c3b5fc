from cooc.cli import main

main()
