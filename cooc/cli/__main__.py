from cooc.__main__ import main

main()
