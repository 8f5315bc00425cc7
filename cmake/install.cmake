# The files that `make install` and `make deb` install, in components: runtime (the shared library), development
# (headers, static library, CMake and pkg-config files, man pages of the functions), program, and parallel and
# parallel_development (libcotangent_parallel, which needs MPI).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS cotangent EXPORT cotangent-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT development)
install(TARGETS cotangent_static EXPORT cotangent-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(DIRECTORY include/cotangent ${PROJECT_BINARY_DIR}/include/cotangent
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)

if(COT_PARALLEL)
  set_target_properties(cotangent_parallel PROPERTIES INSTALL_RPATH "$ORIGIN")
  install(TARGETS cotangent_parallel LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT parallel
    NAMELINK_COMPONENT parallel_development)
  configure_file(cmake/cotangent_parallel.pc.in cotangent_parallel.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cotangent_parallel.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
    COMPONENT parallel_development)
endif()

# ---- find_package(cotangent): cotangent::cotangent and cotangent::static -----------------------------------------
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cotangent)
install(EXPORT cotangent-targets NAMESPACE cotangent:: DESTINATION ${package_dir} COMPONENT development
  FILE cotangent-config.cmake) # no find_dependency: every compiler has the libraries that the static library needs
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/cotangent-config-version.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cotangent-config-version.cmake DESTINATION ${package_dir}
  COMPONENT development)

# ---- pkg-config ---------------------------------------------------------------------------------------------------
list(TRANSFORM COT_NEEDS REPLACE "^([^/].*)" "-l\\1" OUTPUT_VARIABLE private_libraries)
list(JOIN private_libraries " " private_libraries)
configure_file(cmake/cotangent.pc.in cotangent.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cotangent.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT development)

# ---- the program and the man pages ----------------------------------------------------------------------------------
if(COT_PROGRAM)
  install(TARGETS cotangent_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
  install(FILES src/cli/completion.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
    RENAME cotangent COMPONENT program)

  # The man pages are generated: section 1 from the program's --help, section 3 from the headers' comments.
  find_program(COT_HELP2MAN help2man)
  find_program(COT_DOXYGEN doxygen)
  if(COT_HELP2MAN AND COT_DOXYGEN)
    set(man ${CMAKE_CURRENT_BINARY_DIR}/man)
    file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/cotangent/*.h)
    add_custom_command(OUTPUT ${man}/written
      COMMAND tools/make_man.sh $<TARGET_FILE:cotangent_program> ${man}
      COMMAND ${CMAKE_COMMAND} -E touch ${man}/written
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} VERBATIM
      DEPENDS cotangent_program tools/make_man.sh tools/make_docs.sh docs/api/Doxyfile docs/api/filter.sed ${headers})
    if(NOT COT_TESTS) # development builds skip the man pages
      set(in_all ALL)
    endif()
    add_custom_target(cot_man ${in_all} DEPENDS ${man}/written)
    install(DIRECTORY ${man}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT program OPTIONAL)
    install(DIRECTORY ${man}/man3 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT development OPTIONAL)
  else()
    message(NOTICE "The man pages are left out: they need help2man and doxygen")
  endif()
endif()

# ---- Debian packages: libcotangent0, libcotangent-dev, cotangent, libcotangent-parallel0, libcotangent-parallel-dev ---
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_VENDOR Cotangent)
set(CPACK_PACKAGE_CONTACT "The Cotangent developers <cotangent@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/deb)
set(CPACK_COMPONENTS_ALL runtime development program)
if(COT_PARALLEL)
  list(APPEND CPACK_COMPONENTS_ALL parallel parallel_development)
endif()
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME libcotangent${PROJECT_VERSION_MAJOR})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libcotangent-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libcotangent${PROJECT_VERSION_MAJOR} (= ${PROJECT_VERSION})")
# dpkg-shlibdeps finds libcotangent.so.0 there, whose package is not installed yet.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR})
set(CPACK_DEBIAN_PARALLEL_PACKAGE_NAME libcotangent-parallel${PROJECT_VERSION_MAJOR})
set(CPACK_DEBIAN_PARALLEL_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_PARALLEL_PACKAGE_DEPENDS "libcotangent${PROJECT_VERSION_MAJOR} (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_PARALLEL_DEVELOPMENT_PACKAGE_NAME libcotangent-parallel-dev)
set(CPACK_DEBIAN_PARALLEL_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PARALLEL_DEVELOPMENT_PACKAGE_DEPENDS
  "libcotangent-parallel${PROJECT_VERSION_MAJOR} (= ${PROJECT_VERSION}), libcotangent-dev (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME cotangent)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
include(CPack)
