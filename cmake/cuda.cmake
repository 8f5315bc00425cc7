# Device code: every .cu file becomes one compressed fat binary, embedded in the target as cot_image_STEM. The array
# `symbol` lists them and ends with a null pointer.
#
#   *_sm90.cu   uses Hopper-only instructions: machine code for sm_90a only
#   other .cu   for every GPU, compiled once: PTX for 8.0, and machine code for sm_90 from the same PTX
#   COT_HOPPER_PARTS
#               for every GPU, with parts for Hopper only: compiled once for sm_90a, once as PTX for 8.0
#
# For other GPUs the driver compiles the PTX at the first call and caches the result. COT_GPUS adds machine code for
# more GPUs to the build. Each of them takes 50 % more compile time.
set(COT_GPUS "" CACHE STRING "Machine code to add for kernels that are not for Hopper only, for example 80;86;89")
set(COT_HOPPER_PARTS causal_conv1d_generic dropout_bwd_rows dropout_fwd_rows mhc_generic mhc_sinkhorn)

# ptxas's report of registers and spills is kept beside each fat binary (STEM.log), for tools/check_device_code.sh.
function(cot_embed_device_code target symbol)
  set(directory ${PROJECT_BINARY_DIR}/cuda)
  file(MAKE_DIRECTORY ${directory})
  if(NOT TARGET device_code) # without compiling anything else, for COT_FATBINS of another build
    add_custom_target(device_code)
  endif()
  set(assembly "    .section .rodata\n")
  set(table "")
  set(images "")
  foreach(source IN LISTS ARGN)
    get_filename_component(stem ${source} NAME_WE)
    set(image ${directory}/${stem}.fatbin)
    if(COT_FATBINS)
      set(image ${COT_FATBINS}/${stem}.fatbin)
    endif()
    set(hopper -gencode arch=compute_90a,code=sm_90a)
    list(TRANSFORM COT_GPUS REPLACE "(.+)" "sm_\\1," OUTPUT_VARIABLE others)
    string(REPLACE ";" "" others "${others}")
    if(stem MATCHES "_sm90$")
      set(architectures ${hopper})
    elseif(stem IN_LIST COT_HOPPER_PARTS)
      set(architectures ${hopper} -gencode "arch=compute_80,code=[${others}compute_80]")
    else()
      set(architectures -DCOT_EVERY_GPU -gencode "arch=compute_80,code=[${others}sm_90,compute_80]")
    endif()
    if(NOT COT_FATBINS)
      add_custom_command(OUTPUT ${image}
        COMMAND ${PROJECT_SOURCE_DIR}/tools/compile_device_code.sh ${directory}/${stem}.log
          ${COT_NVCC} -fatbin -std=c++17 -O3 ${architectures} -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src
          -Werror all-warnings -Xptxas -v,-warn-spills -Xfatbin -compress-all -MD -MF ${directory}/${stem}.d -MT ${image}
          -o ${image} ${source}
        COMMENT "Compiling GPU code ${stem}.cu" DEPENDS ${source} DEPFILE ${directory}/${stem}.d VERBATIM)
    endif()
    list(APPEND images ${image})
    string(APPEND assembly "    .balign 64\n    .globl cot_image_${stem}\n    .hidden cot_image_${stem}\n"
      "cot_image_${stem}:\n    .incbin \"${image}\"\n")
    string(APPEND table "    .8byte cot_image_${stem}\n")
  endforeach()
  string(APPEND assembly "    .section .data.rel.ro, \"aw\"\n    .balign 8\n    .globl ${symbol}\n"
    "    .hidden ${symbol}\n${symbol}:\n${table}    .8byte 0\n"
    "    .section .note.GNU-stack, \"\", %progbits\n")
  file(GENERATE OUTPUT ${directory}/${symbol}.S CONTENT "${assembly}")
  set_source_files_properties(${directory}/${symbol}.S PROPERTIES OBJECT_DEPENDS "${images}" GENERATED TRUE)
  target_sources(${target} PRIVATE ${directory}/${symbol}.S)
  add_custom_target(${symbol}_code DEPENDS ${images})
  add_dependencies(device_code ${symbol}_code)
endfunction()
