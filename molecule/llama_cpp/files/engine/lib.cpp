const char *known[] = {"qwen4exp"};
int answer() { return 42; }
