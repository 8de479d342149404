#include "command.h"
int command_parity(int argc, char **argv) { (void)argc; (void)argv; return EXIT_USAGE; }
