/* Settings of all stubs, read from the environment at every call, so that a test changes them as it runs:
 *   STUB_DEVICES  number of GPUs, 1 by default; CUDA_VISIBLE_DEVICES=7 hides all of them from CUDA, not from NVML
 *   STUB_DRIVER   newest CUDA version that the driver runs, 13000 by default
 *   STUB_MEMORY   bytes of memory of each GPU, 80 GiB by default
 *   STUB_ERRORS   calls that fail, as FUNCTION@DEVICE=CODE with spaces between; copyOnDevice is a copy within a GPU
 *   STUB_LOG      file that gets one line per logged call: FUNCTION NUMBERS @DEVICE
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

static int error_of(const char *function, int device) {
  char key[128];
  const char *errors = getenv("STUB_ERRORS"), *found;
  snprintf(key, sizeof key, "%s@%d=", function, device);
  found = errors ? strstr(errors, key) : NULL;
  return found ? atoi(found + strlen(key)) : 0;
}

static int visible_devices(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  return visible && !strcmp(visible, "7") ? 0 : (int)setting("STUB_DEVICES", 1);
}
