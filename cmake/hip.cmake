# Code for AMD GPUs: .cu files of portable kernels, which clang compiles with src/hip/device/vocabulary.h in front. Each
# one becomes a bundle of code objects for gfx90a and gfx942, embedded in the target as cot_hip_image_STEM. The array
# `symbol` lists them and ends with a null pointer. Needs no part of ROCm: no header, no device library.
#
# Clang's remarks are kept beside each bundle (STEM.log), for tools/check_hip_code.sh.
function(cot_embed_hip_code target symbol)
  set(directory ${PROJECT_BINARY_DIR}/hip)
  file(MAKE_DIRECTORY ${directory})
  set(assembly "    .section .rodata\n")
  set(table "")
  set(images "")
  foreach(source IN LISTS ARGN)
    get_filename_component(stem ${source} NAME_WE)
    set(image ${directory}/${stem}.hipfb)
    if(COT_FATBINS AND EXISTS ${COT_FATBINS}/../hip/${stem}.hipfb) # of the same other build
      set(image ${COT_FATBINS}/../hip/${stem}.hipfb)
    else()
      add_custom_command(OUTPUT ${image}
        COMMAND ${PROJECT_SOURCE_DIR}/tools/compile_hip_code.sh ${COT_HIP_CLANG} ${PROJECT_SOURCE_DIR} ${image} ${source}
          -MD -MF ${directory}/${stem}.d -MT ${image}
        COMMENT "Compiling AMD GPU code ${stem}.cu" DEPENDS ${source} ${PROJECT_SOURCE_DIR}/tools/compile_hip_code.sh
        DEPFILE ${directory}/${stem}.d VERBATIM)
    endif()
    list(APPEND images ${image})
    string(APPEND assembly "    .balign 4096\n    .globl cot_hip_image_${stem}\n    .hidden cot_hip_image_${stem}\n"
      "cot_hip_image_${stem}:\n    .incbin \"${image}\"\n")
    string(APPEND table "    .8byte cot_hip_image_${stem}\n")
  endforeach()
  string(APPEND assembly "    .section .data.rel.ro, \"aw\"\n    .balign 8\n    .globl ${symbol}\n"
    "    .hidden ${symbol}\n${symbol}:\n${table}    .8byte 0\n"
    "    .section .note.GNU-stack, \"\", %progbits\n")
  file(GENERATE OUTPUT ${directory}/${symbol}.S CONTENT "${assembly}")
  set_source_files_properties(${directory}/${symbol}.S PROPERTIES OBJECT_DEPENDS "${images}" GENERATED TRUE)
  target_sources(${target} PRIVATE ${directory}/${symbol}.S)
  if(NOT TARGET device_code) # as in cmake/cuda.cmake
    add_custom_target(device_code)
  endif()
  add_custom_target(${symbol}_code DEPENDS ${images})
  add_dependencies(device_code ${symbol}_code)
endfunction()
