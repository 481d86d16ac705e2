/* libnvidia-ml.so.1 of a machine with one H200, as far as vLLM and our plan ask it. Not `nvmlInit`, by which torch
 * asks: torch uses the driver, whose stub has no device. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
typedef struct { unsigned long long total, free, used; } memory;

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "not supported by the stub"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)1;
  return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (strcmp(uuid, "GPU-00000000-0000-0000-0000-000000000000")) return NOT_FOUND;
  *device = (void *)1;
  return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  const char *given = getenv("STUB_CAPABILITY"); /* such as 80 of an A100 */
  int both = given ? atoi(given) : 90;
  *major = both / 10;
  *minor = both % 10;
  return SUCCESS;
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  strncpy(name, "NVIDIA H200", size);
  return SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
  strncpy(uuid, "GPU-00000000-0000-0000-0000-000000000000", size);
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *found) {
  *found = (memory){150120431616ULL, 149000000000ULL, 1120431616ULL}; /* 139.81 GiB */
  return SUCCESS;
}
int nvmlDeviceGetNumaNodeId(void *device, unsigned *node) { return NOT_SUPPORTED; }
int nvmlDeviceGetCpuAffinity(void *device, unsigned size, unsigned long *set) {
  return NOT_SUPPORTED;
}
