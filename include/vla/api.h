/* Linkage: symbols are hidden unless marked VLA_API, everything is C. */
#ifndef VLA_API_H
#define VLA_API_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define VLA_API __attribute__((visibility("default")))
#else
#define VLA_API
#endif

#ifdef __cplusplus
#define VLA_BEGIN_DECLS extern "C" {
#define VLA_END_DECLS }
#else
#define VLA_BEGIN_DECLS
#define VLA_END_DECLS
#endif

#define VLA_VERSION_MAJOR 0
#define VLA_VERSION_MINOR 1
#define VLA_VERSION_PATCH 0
#define VLA_VERSION "0.1.0"

#endif
