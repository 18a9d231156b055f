#include <cstdio>
#include <cstring>
#include <unistd.h>
int answer();
int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "--version")) printf("version: %s (build 0, commit %s)\n", VERSION, COMMIT);
  if (argc > 1 && !strcmp(argv[1], "--help")) printf("-m,    --model FNAME                    the model\n");
  while (argc > 1 && !strcmp(argv[1], "--serve")) pause();
  return answer() == 42 ? 0 : 1;
}
