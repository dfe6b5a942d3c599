/* The part of libcuda.so.1 that CUDA's runtime reads before it checks whether the driver is NVIDIA's own. */
#include "common.h"
#include <dlfcn.h>

static int nothing() { return 0; }
static void *table[32];

int cuDriverGetVersion(int *version) { *version = setting("STUB_DRIVER", 13000); return 0; }
int cuInit(unsigned flags) {
  int error = error_of("cuInit", 0);
  return error ? error : visible_devices() ? 0 : 100;
}
int cuGetExportTable(const void **out, const unsigned char *id) {
  table[0] = (void *)sizeof table;
  for (int entry = 1; entry < 32; entry++) table[entry] = nothing;
  *out = table;
  return 0;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void *own = dlsym(self, strcmp(name, "cuGetProcAddress") ? name : "cuGetProcAddress_v2");
  *function = own ? own : (void *)nothing;
  if (status) *status = 0;
  return 0;
}
int cuTensorMapEncodeTiled() { return 0; }
