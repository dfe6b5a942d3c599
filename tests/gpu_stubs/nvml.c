/* NVML as nvidia-ml-py calls it: a driver and its GPUs. */
#include "common.h"

static char handles[16];
static int number(void *device) { return (char *)device - handles; }

int nvmlInitWithFlags(unsigned flags) { return error_of("nvmlInit", 0); }
int nvmlInit_v2(void) { return error_of("nvmlInit", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "Driver/library version mismatch"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  long cuda = setting("STUB_DRIVER", 13000);
  snprintf(text, size, "%s", cuda < 13000 ? "550.54.15" : "580.95.05");
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = setting("STUB_DRIVER", 13000); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = setting("STUB_DEVICES", 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (index >= setting("STUB_DEVICES", 1)) return 2;
  *device = handles + index;
  return error_of("nvmlDeviceGetHandleByIndex", index);
}
/* GPU-1 is the UUID of the second */
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  return nvmlDeviceGetHandleByIndex_v2(atoi(strchr(uuid, '-') + 1), device);
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  snprintf(name, size, "Stub H100 %d", number(device));
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9, *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *info) {
  info[0] = setting("STUB_MEMORY", 80L << 30), info[2] = 5000000000, info[1] = info[0] - info[2];
  return 0;
}
/* clocks and utilisation are not there: this GPU does not report them */
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = 699500; return 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { *celsius = 88; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) { *reasons = 0x48; return 0; }
