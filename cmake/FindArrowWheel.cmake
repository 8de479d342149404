# Arrow and Parquet C++ from the pinned pyarrow wheel, unpacked by tools/deps into third_party/pyarrow. No Python is
# needed to use them. Target: ArrowWheel::parquet.
file(GLOB _arrow_libraries ${CMAKE_SOURCE_DIR}/third_party/pyarrow/libarrow.so.[0-9]*)
file(GLOB _parquet_libraries ${CMAKE_SOURCE_DIR}/third_party/pyarrow/libparquet.so.[0-9]*)
set(_arrow_include ${CMAKE_SOURCE_DIR}/third_party/pyarrow/include)
if(_arrow_libraries AND _parquet_libraries AND EXISTS ${_arrow_include}/parquet/api/reader.h)
  set(ArrowWheel_FOUND TRUE)
  list(GET _arrow_libraries 0 _arrow)
  list(GET _parquet_libraries 0 _parquet)
  add_library(ArrowWheel::arrow SHARED IMPORTED)
  set_target_properties(ArrowWheel::arrow PROPERTIES IMPORTED_LOCATION ${_arrow}
                        INTERFACE_SYSTEM_INCLUDE_DIRECTORIES ${_arrow_include}
                        INTERFACE_INCLUDE_DIRECTORIES ${_arrow_include})
  add_library(ArrowWheel::parquet SHARED IMPORTED)
  set_target_properties(ArrowWheel::parquet PROPERTIES IMPORTED_LOCATION ${_parquet}
                        INTERFACE_LINK_LIBRARIES ArrowWheel::arrow)
else()
  set(ArrowWheel_NOT_FOUND_MESSAGE "Arrow C++ is missing: run tools/deps (or `make deps`)")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(ArrowWheel REQUIRED_VARS ArrowWheel_FOUND
                                  REASON_FAILURE_MESSAGE "${ArrowWheel_NOT_FOUND_MESSAGE}")
