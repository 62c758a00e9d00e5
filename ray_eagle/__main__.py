from ray_eagle.cli import main

main()
